import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.sql.Array;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.sql.Statement;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Properties;
import java.util.TimeZone;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.locks.LockSupport;
import org.postgresql.PGConnection;
import org.postgresql.PGNotification;
import org.postgresql.PGProperty;
import org.postgresql.copy.CopyManager;
import org.postgresql.largeobject.LargeObject;
import org.postgresql.largeobject.LargeObjectManager;

/** Each check returns a value that does not depend on time, process or address. */
final class Suite implements AutoCloseable {
  /** The period is prime, so that a lost or doubled buffer shows. */
  private static final String PATTERN = "0123456789abcdefghijklmnopqrstu";
  private static final int LARGE_ROW = 64 * 1024 * 1024;
  private static final int LARGE_OBJECT = 1024 * 1024;
  private static final int CONNECTS = 1000;
  /** Runs until it is cancelled, and says when it has begun. */
  private static final String ENDLESS =
      "DO $$ BEGIN RAISE NOTICE 'running'; PERFORM pg_sleep(600); END $$";
  private static final String SETTINGS =
      "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'";

  private final Main.Config config;
  private final Connection first;
  private final PGConnection driver;

  Suite(Main.Config config) throws SQLException {
    this.config = config;
    this.first = open(Map.of());
    this.driver = first.unwrap(PGConnection.class);
  }

  Map<String, Main.Check> checks() {
    Map<String, Main.Check> checks = new LinkedHashMap<>();
    checks.put("connect", this::connect);
    checks.put("parameters", () -> new TreeMap<>(driver.getParameterStatuses()));
    checks.put("prepared", this::prepared);
    checks.put("binary", this::binary);
    checks.put("copy", this::copy);
    checks.put("notify", this::listenAndNotify);
    checks.put("cancel", this::cancel);
    checks.put("large_object", this::largeObject);
    checks.put("large_row", this::largeRow);
    checks.put("transaction", this::transaction);
    checks.put("encoding", this::encoding);
    checks.put("reset_all", this::resetAll);
    checks.put("discard_all", this::discardAll);
    checks.put("pool", this::pool);
    checks.put("timezone", this::timezone);
    checks.put("latin1", this::latin1);
    checks.put("application_name", this::applicationName);
    checks.put("options", this::options);
    checks.put("connects", this::connects);
    return checks;
  }

  @Override
  public void close() throws SQLException {
    first.close();
  }

  private String url() {
    return "jdbc:postgresql://" + config.host() + ":" + config.port() + "/" + config.database();
  }

  private Properties properties(Map<PGProperty, String> more) {
    Properties properties = new Properties();
    PGProperty.USER.set(properties, config.user());
    if (config.password() != null) PGProperty.PASSWORD.set(properties, config.password());
    PGProperty.SSL_MODE.set(properties, config.ca() == null ? "disable" : "verify-full");
    if (config.ca() != null) PGProperty.SSL_ROOT_CERT.set(properties, config.ca());
    more.forEach((property, value) -> property.set(properties, value));
    return properties;
  }

  private Connection open(Map<PGProperty, String> more) throws SQLException {
    return DriverManager.getConnection(url(), properties(more));
  }

  private static PreparedStatement prepare(Connection connection, String query, Object... parameters)
      throws SQLException {
    PreparedStatement statement = connection.prepareStatement(query);
    for (int i = 0; i < parameters.length; i++) statement.setObject(i + 1, parameters[i]);
    return statement;
  }

  private static List<Object> row(Connection connection, String query, Object... parameters) throws SQLException {
    try (PreparedStatement statement = prepare(connection, query, parameters);
        ResultSet rows = statement.executeQuery()) {
      rows.next();
      List<Object> row = new ArrayList<>();
      for (int i = 1; i <= rows.getMetaData().getColumnCount(); i++) row.add(rows.getObject(i));
      return row;
    }
  }

  private static Object value(Connection connection, String query, Object... parameters) throws SQLException {
    return row(connection, query, parameters).get(0);
  }

  private static void execute(Connection connection, String statements) throws SQLException {
    try (Statement statement = connection.createStatement()) {
      statement.execute(statements);
    }
  }

  /** The SQLSTATE of an error that is expected. */
  private static String code(Main.Check check) throws Exception {
    try {
      check.run();
    } catch (SQLException error) {
      return error.getSQLState();
    }
    throw new IllegalStateException("expected an error of the server");
  }

  private static Map<String, String> pairs(Connection connection, String query) throws SQLException {
    Map<String, String> pairs = new TreeMap<>();
    try (Statement statement = connection.createStatement();
        ResultSet rows = statement.executeQuery(query)) {
      while (rows.next()) pairs.put(rows.getString(1), rows.getString(2));
    }
    return pairs;
  }

  private static List<String> changed(Map<String, String> before, Map<String, String> after) {
    TreeSet<String> names = new TreeSet<>(before.keySet());
    names.addAll(after.keySet());
    names.removeIf(name -> Objects.equals(before.get(name), after.get(name)));
    return List.copyOf(names);
  }

  private static String repeated(int size) {
    return PATTERN.repeat(size / PATTERN.length() + 1).substring(0, size);
  }

  private static String repeatedSql(int size) {
    return "left(repeat('%s', %d), %d)".formatted(PATTERN, size / PATTERN.length() + 1, size);
  }

  private static String digest(byte[] data) throws Exception {
    return HexFormat.of().formatHex(MessageDigest.getInstance("MD5").digest(data));
  }

  /** A thousand rows in COPY's text format, with NULLs, escapes and more than ASCII. */
  private static byte[] copyText() {
    StringBuilder text = new StringBuilder();
    for (int i = 1; i <= 1000; i++) {
      String value = i % 10 == 0 ? "\\N" : "line " + i + " ☃\\twith\\ttabs\\nand a newline";
      text.append(i).append('\t').append(value).append('\n');
    }
    return text.toString().getBytes(StandardCharsets.UTF_8);
  }

  private Object connect() throws SQLException {
    return Map.of(
        "row", row(first, "SELECT current_user, session_user, current_database(), 1"),
        "client_settings",
        pairs(first, "SELECT name, reset_val FROM pg_settings"
            + " WHERE name IN ('DateStyle', 'IntervalStyle', 'TimeZone', 'client_encoding', 'extra_float_digits', 'search_path') ORDER BY name"));
  }

  private Object prepared() throws SQLException {
    List<Object> rows = new ArrayList<>();
    try (PreparedStatement statement = first.prepareStatement("SELECT ?::int + 1, ?::text")) {
      // Named from the first execution on.
      statement.unwrap(org.postgresql.PGStatement.class).setPrepareThreshold(1);
      for (int i = 0; i < 3; i++) {
        statement.setInt(1, i);
        statement.setString(2, "text " + i);
        try (ResultSet result = statement.executeQuery()) {
          result.next();
          rows.add(List.of(result.getInt(1), result.getString(2)));
        }
      }
      Object server = value(first,
          "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT $1::int + 1, $2::text'");
      return Map.of("rows", rows, "on_server", server);
    }
  }

  private Object binary() throws SQLException {
    try (PreparedStatement statement = first.prepareStatement(
        "SELECT int8 '-9223372036854775808', float8 '0.1', true, text 'naïve ☃', bytea '\\x00ff10',"
            + " timestamptz '2024-01-02 03:04:05.678Z', '{1,NULL,3}'::int4[]")) {
      // Binary from the first execution on, for each type that pgjdbc can read so.
      statement.unwrap(org.postgresql.PGStatement.class).setPrepareThreshold(-1);
      try (ResultSet row = statement.executeQuery()) {
        row.next();
        Array int4s = row.getArray(7);
        Map<String, Object> values = new LinkedHashMap<>();
        values.put("int8", String.valueOf(row.getLong(1)));
        values.put("float8", row.getDouble(2));
        values.put("bool", row.getBoolean(3));
        values.put("text", row.getString(4));
        values.put("bytea", HexFormat.of().formatHex(row.getBytes(5)));
        values.put("timestamptz", row.getObject(6, OffsetDateTime.class).toInstant().toEpochMilli());
        values.put("int4[]", Arrays.asList((Integer[]) int4s.getArray()));
        return values;
      }
    }
  }

  private Object copy() throws Exception {
    byte[] data = copyText();
    CopyManager manager = driver.getCopyAPI();
    execute(first, "CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)");
    long rowsIn = manager.copyIn("COPY copied FROM STDIN", new ByteArrayInputStream(data));
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    manager.copyOut("COPY (SELECT * FROM copied ORDER BY id) TO STDOUT", out);
    byte[] bad = "word\tvalue\n".getBytes(StandardCharsets.UTF_8);
    return Map.of(
        "rows_in", rowsIn,
        "out", digest(out.toByteArray()),
        "same", Arrays.equals(out.toByteArray(), data),
        "bad_row", code(() -> manager.copyIn("COPY copied FROM STDIN", new ByteArrayInputStream(bad))));
  }

  private Object listenAndNotify() throws SQLException {
    execute(first, "LISTEN events");
    try (Connection other = open(Map.of())) {
      value(other, "SELECT pg_notify('events', 'naïve ☃')");
    }
    PGNotification notification = driver.getNotifications(30_000)[0];
    return Map.of("channel", notification.getName(), "payload", notification.getParameter());
  }

  private Object cancel() throws Exception {
    try (Statement statement = first.createStatement()) {
      CompletableFuture<String> failed = CompletableFuture.supplyAsync(() -> {
        try {
          return code(() -> statement.execute(ENDLESS));
        } catch (Exception error) {
          return error.toString();
        }
      });
      // pgjdbc has no events for notices: they are warnings of the statement that runs.
      while (statement.getWarnings() == null && !failed.isDone()) LockSupport.parkNanos(1_000_000);
      statement.cancel();
      return Map.of("cancelled", "57014".equals(failed.get()), "then", value(first, "SELECT 1"));
    }
  }

  private Object largeObject() throws Exception {
    LargeObjectManager manager = driver.getLargeObjectAPI();
    first.setAutoCommit(false);
    try {
      long oid = manager.createLO();
      byte[] middle;
      byte[] content;
      try (LargeObject object = manager.open(oid)) {
        object.write(repeated(LARGE_OBJECT).getBytes(StandardCharsets.UTF_8));
        object.seek(500_000);
        middle = object.read(31);
        object.seek(0);
        content = object.read(2 * LARGE_OBJECT);
      }
      manager.unlink(oid);
      first.commit();
      String gone = code(() -> manager.open(oid));
      return Map.of(
          "written", content.length,
          "digest", digest(content),
          "middle", new String(middle, StandardCharsets.UTF_8),
          "gone", gone);
    } finally {
      first.rollback();
      first.setAutoCommit(true);
    }
  }

  private Object largeRow() throws SQLException {
    String text = repeated(LARGE_ROW);
    boolean same = text.equals(value(first, "SELECT " + repeatedSql(LARGE_ROW)));
    return Map.of(
        "out", same, "in", row(first, "SELECT length(t), md5(t) FROM (SELECT ?::text AS t) AS given", text));
  }

  private Object transaction() throws Exception {
    execute(first, "CREATE TEMP TABLE numbers (n int PRIMARY KEY)");
    first.setAutoCommit(false);
    try {
      execute(first, "INSERT INTO numbers VALUES (1)");
      Savepoint savepoint = first.setSavepoint();
      execute(first, "INSERT INTO numbers VALUES (2)");
      String failed = code(() -> value(first, "SELECT 1 / 0"));
      String aborted = code(() -> value(first, "SELECT 1"));
      first.rollback(savepoint);
      execute(first, "INSERT INTO numbers VALUES (3)");
      first.commit();
      List<Integer> numbers = new ArrayList<>();
      try (Statement statement = first.createStatement();
          ResultSet rows = statement.executeQuery("SELECT n FROM numbers ORDER BY n")) {
        while (rows.next()) numbers.add(rows.getInt(1));
      }
      return Map.of("error", failed, "aborted", aborted, "rows", numbers);
    } finally {
      first.rollback();
      first.setAutoCommit(true);
    }
  }

  private Object encoding() throws SQLException {
    List<Object> row = row(first,
        "SELECT current_setting('client_encoding'), t, octet_length(t) FROM (SELECT ?::text AS t) AS given",
        "naïve ☃ 𝄞");
    return Map.of("client", row.get(0), "text", row.get(1), "octets", row.get(2));
  }

  private Object resetAll() throws SQLException {
    Map<String, String> before = pairs(first, SETTINGS);
    execute(first, "SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'");
    List<String> set = changed(before, pairs(first, SETTINGS));
    execute(first, "RESET ALL");
    return Map.of("set", set, "left", changed(before, pairs(first, SETTINGS)));
  }

  private Object discardAll() throws SQLException {
    execute(first, "CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off");
    try (PreparedStatement kept = first.prepareStatement("SELECT 'kept until now'")) {
      kept.unwrap(org.postgresql.PGStatement.class).setPrepareThreshold(1);
      kept.executeQuery().close();
      execute(first, "DISCARD ALL");
      Object left = value(first,
          "SELECT (SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT ''kept until%')"
              + " + (SELECT count(*) FROM pg_listening_channels())"
              + " + (to_regclass('pg_temp.discarded') IS NOT NULL)::int");
      try (ResultSet again = kept.executeQuery()) {
        again.next();
        return Map.of("left", left, "prepared_again", again.getString(1));
      }
    }
  }

  private HikariDataSource newPool(int size) {
    HikariConfig pool = new HikariConfig();
    pool.setJdbcUrl(url());
    pool.setDataSourceProperties(properties(Map.of()));
    pool.setMaximumPoolSize(size);
    return new HikariDataSource(pool);
  }

  private Object pool() throws Exception {
    Map<String, Object> result = new LinkedHashMap<>();
    try (HikariDataSource pool = newPool(1)) {
      Object pid;
      try (Connection connection = pool.getConnection()) {
        pid = value(connection, "SELECT pg_backend_pid()");
        execute(connection, "SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()");
        // HikariCP does not reset what is given back to it: its users do.
        execute(connection, "DISCARD ALL");
      }
      try (Connection connection = pool.getConnection()) {
        result.put("reused", pid.equals(value(connection, "SELECT pg_backend_pid()")));
        result.put("statement_timeout", value(connection, "SHOW statement_timeout"));
        result.put("temp_table", value(connection, "SELECT to_regclass('pg_temp.left_over')::text"));
      }
    }
    ExecutorService threads = Executors.newFixedThreadPool(8);
    try (HikariDataSource pool = newPool(4)) {
      List<Future<Integer>> squares = new ArrayList<>();
      for (int i = 0; i < 40; i++) {
        int number = i;
        squares.add(threads.submit(() -> {
          try (Connection connection = pool.getConnection()) {
            return (Integer) value(connection, "SELECT ?::int * ?::int", number, number);
          }
        }));
      }
      int sum = 0;
      for (Future<Integer> square : squares) sum += square.get();
      result.put("sum", sum);
    } finally {
      threads.shutdown();
    }
    return result;
  }

  private Object timezone() throws SQLException {
    // pgjdbc gives the server the time zone of the virtual machine.
    TimeZone before = TimeZone.getDefault();
    TimeZone.setDefault(TimeZone.getTimeZone("Asia/Kolkata"));
    try (Connection connection = open(Map.of())) {
      return Map.of(
          "text", value(connection, "SELECT '2024-01-02 03:04:05Z'::timestamptz::text"),
          "status", connection.unwrap(PGConnection.class).getParameterStatus("TimeZone"));
    } finally {
      TimeZone.setDefault(before);
    }
  }

  private Object latin1() throws Main.Unsupported {
    throw new Main.Unsupported("pgjdbc reads and writes UTF-8 only and refuses another client_encoding");
  }

  private Object applicationName() throws SQLException {
    try (Connection connection = open(Map.of(PGProperty.APPLICATION_NAME, "branchpool drivers"))) {
      return Map.of(
          "show", value(connection, "SHOW application_name"),
          "activity",
          value(connection, "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()"));
    }
  }

  private Object options() throws SQLException {
    String options = "-c geqo=off -c statement_timeout=54321 -c search_path=one,\"two\\ three\"";
    try (Connection connection = open(Map.of(PGProperty.OPTIONS, options))) {
      List<Object> atStart = shown(connection);
      execute(connection, "SET geqo = on; SET statement_timeout = 0; SET search_path = public");
      execute(connection, "RESET ALL");
      return Map.of("at_start", atStart, "after_reset", shown(connection));
    }
  }

  private static List<Object> shown(Connection connection) throws SQLException {
    return List.of(
        value(connection, "SHOW geqo"),
        value(connection, "SHOW statement_timeout"),
        value(connection, "SHOW search_path"));
  }

  private Object connects() throws SQLException {
    int sum = 0;
    for (int i = 0; i < CONNECTS; i++) {
      try (Connection connection = open(Map.of())) {
        sum += (Integer) value(connection, "SELECT ?::int", i);
      }
    }
    return Map.of("sum", sum);
  }
}
