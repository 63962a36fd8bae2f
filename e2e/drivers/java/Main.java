import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The common checks with pgjdbc and HikariCP. */
public final class Main {
  /** Where the server is. With a CA the connection is TLS and the server's name is checked. */
  record Config(
      String host, int port, String user, String password, String database, String ca, List<String> only) {
    boolean wants(String name) {
      return only == null || only.isEmpty() || only.contains(name);
    }
  }

  /** What this driver cannot do, and why. */
  @SuppressWarnings("serial")
  static final class Unsupported extends Exception {
    Unsupported(String reason) {
      super(reason);
    }
  }

  interface Check {
    Object run() throws Exception;
  }

  private static Object result(String name, Check check) {
    try {
      return check.run();
    } catch (Unsupported reason) {
      return Map.of("unsupported", reason.getMessage());
    } catch (Exception error) {
      System.err.println(name);
      error.printStackTrace();
      return Map.of("failed", error.toString());
    }
  }

  public static void main(String[] arguments) throws Exception {
    Gson gson = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
    Config config = gson.fromJson(new InputStreamReader(System.in, StandardCharsets.UTF_8), Config.class);
    Map<String, Object> results = new LinkedHashMap<>();
    try (Suite suite = new Suite(config)) {
      suite.checks().forEach((name, check) -> {
        if (config.wants(name)) results.put(name, result(name, check));
      });
    }
    new PrintStream(System.out, true, StandardCharsets.UTF_8).println(gson.toJson(results));
  }
}
