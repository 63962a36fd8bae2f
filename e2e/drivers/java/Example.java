import java.net.URI;
import java.sql.DriverManager;

public final class Example {
  public static void main(String[] arguments) throws Exception {
    // A JDBC URL has no place for the login.
    URI uri = URI.create(System.getenv("DATABASE_URL"));
    String[] login = uri.getUserInfo().split(":", 2);
    String address = uri.getHost() + ":" + uri.getPort() + uri.getPath() + "?" + uri.getQuery();
    try (var connection = DriverManager.getConnection("jdbc:postgresql://" + address, login[0], login[1]);
        var statement = connection.createStatement();
        var rows = statement.executeQuery("SELECT current_database()")) {
      rows.next();
      System.out.println(rows.getString(1));
    }
  }
}
