package main

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// The period is prime, so that a lost or doubled buffer shows.
	pattern     = "0123456789abcdefghijklmnopqrstu"
	largeRow    = 64 * 1024 * 1024
	largeObject = 1024 * 1024
	// Runs until it is cancelled, and says when it has begun.
	endless      = "DO $$ BEGIN RAISE NOTICE 'running'; PERFORM pg_sleep(600); END $$"
	settingsRows = "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'"
)

type suite struct {
	config  Config
	first   *pgx.Conn
	notices chan string
}

func newSuite(ctx context.Context, config Config) (*suite, error) {
	suite := &suite{config: config, notices: make(chan string, 1)}
	parsed, err := suite.parsed()
	if err != nil {
		return nil, err
	}
	parsed.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) {
		if notice.Message == "running" {
			suite.notices <- notice.Message
		}
	}
	suite.first, err = pgx.ConnectConfig(ctx, parsed)
	return suite, err
}

func (s *suite) checks() []check {
	return []check{
		{"connect", s.connect}, {"parameters", s.parameters}, {"prepared", s.prepared},
		{"binary", s.binary}, {"copy", s.copy}, {"notify", s.notify}, {"cancel", s.cancel},
		{"large_object", s.largeObject}, {"large_row", s.largeRow},
		{"transaction", s.transaction}, {"encoding", s.encoding}, {"reset_all", s.resetAll},
		{"discard_all", s.discardAll}, {"pool", s.pool}, {"timezone", s.timezone},
		{"latin1", s.latin1}, {"application_name", s.applicationName}, {"options", s.options},
		{"connects", s.connects},
	}
}

// connString is libpq's.
func (s *suite) connString() string {
	quote := func(value string) string {
		return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value) + "'"
	}
	parts := []string{
		"host=" + quote(s.config.Host), fmt.Sprintf("port=%d", s.config.Port),
		"user=" + quote(s.config.User), "password=" + quote(s.config.Password),
		"dbname=" + quote(s.config.Database), "sslmode=disable",
	}
	if s.config.CA != "" {
		parts = append(parts, "sslmode=verify-full", "sslrootcert="+quote(s.config.CA))
	}
	return strings.Join(parts, " ")
}

func (s *suite) parsed() (*pgx.ConnConfig, error) { return pgx.ParseConfig(s.connString()) }

// with runs use on a connection with startup parameters of its own.
func (s *suite) with(ctx context.Context, parameters map[string]string, use func(*pgx.Conn) error) error {
	config, err := s.parsed()
	if err != nil {
		return err
	}
	maps.Copy(config.RuntimeParams, parameters)
	connection, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer connection.Close(ctx)
	return use(connection)
}

type querier interface {
	Query(ctx context.Context, query string, arguments ...any) (pgx.Rows, error)
}

func one[T any](ctx context.Context, on querier, query string, arguments ...any) (T, error) {
	// An error of Query is that of rows as well.
	rows, _ := on.Query(ctx, query, arguments...)
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
}

func shown(ctx context.Context, on querier, names ...string) ([]string, error) {
	values := make([]string, 0, len(names))
	for _, name := range names {
		value, err := one[string](ctx, on, "SHOW "+name)
		if err != nil {
			return nil, err
		}
		values = append(values, value)
	}
	return values, nil
}

// code is the SQLSTATE of an error that is expected.
func code(err error) (string, error) {
	var failure *pgconn.PgError
	if errors.As(err, &failure) {
		return failure.Code, nil
	}
	return "", fmt.Errorf("expected an error of the server, got %w", err)
}

func repeated(size int) string { return strings.Repeat(pattern, size/len(pattern)+1)[:size] }

func repeatedSQL(size int) string {
	return fmt.Sprintf("left(repeat('%s', %d), %d)", pattern, size/len(pattern)+1, size)
}

func digest(data []byte) string {
	sum := md5.Sum(data)
	return hex.EncodeToString(sum[:])
}

func pairs(ctx context.Context, on querier, query string) (map[string]string, error) {
	rows, _ := on.Query(ctx, query)
	pairs := map[string]string{}
	var name, value string
	_, err := pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		pairs[name] = value
		return nil
	})
	return pairs, err
}

func changed(before, after map[string]string) []string {
	names := maps.Clone(before)
	maps.Copy(names, after)
	maps.DeleteFunc(names, func(name, _ string) bool {
		old, was := before[name]
		new, is := after[name]
		return was && is && old == new
	})
	return append([]string{}, slices.Sorted(maps.Keys(names))...)
}

// copyText is a thousand rows in COPY's text format, with NULLs, escapes and more than ASCII.
func copyText() []byte {
	var text bytes.Buffer
	for i := 1; i <= 1000; i++ {
		value := `\N`
		if i%10 != 0 {
			value = fmt.Sprintf(`line %d ☃\twith\ttabs\nand a newline`, i)
		}
		fmt.Fprintf(&text, "%d\t%s\n", i, value)
	}
	return text.Bytes()
}

func (s *suite) connect(ctx context.Context) (any, error) {
	var user, session, database string
	var number int
	err := s.first.QueryRow(ctx, "SELECT current_user, session_user, current_database(), 1").
		Scan(&user, &session, &database, &number)
	if err != nil {
		return nil, err
	}
	settings, err := pairs(ctx, s.first, "SELECT name, reset_val FROM pg_settings"+
		" WHERE name IN ('DateStyle', 'IntervalStyle', 'TimeZone', 'client_encoding', 'extra_float_digits', 'search_path') ORDER BY name")
	return object{"row": []any{user, session, database, number}, "client_settings": settings}, err
}

func (s *suite) parameters(context.Context) (any, error) {
	status := map[string]string{}
	for _, name := range []string{
		"DateStyle", "IntervalStyle", "TimeZone", "application_name", "client_encoding",
		"default_transaction_read_only", "in_hot_standby", "integer_datetimes", "is_superuser",
		"scram_iterations", "search_path", "server_encoding", "server_version",
		"session_authorization", "standard_conforming_strings",
	} {
		// Empty as well if the server has not reported it.
		status[name] = s.first.PgConn().ParameterStatus(name)
	}
	return status, nil
}

func (s *suite) prepared(ctx context.Context) (any, error) {
	if _, err := s.first.Prepare(ctx, "added", "SELECT $1::int + 1, $2::text"); err != nil {
		return nil, err
	}
	rows := [][]any{}
	for i := range 3 {
		var number int
		var text string
		err := s.first.QueryRow(ctx, "added", i, fmt.Sprintf("text %d", i)).Scan(&number, &text)
		if err != nil {
			return nil, err
		}
		rows = append(rows, []any{number, text})
	}
	server, err := one[int](ctx, s.first, "SELECT count(*) FROM pg_prepared_statements WHERE name = 'added'")
	return object{"rows": rows, "on_server": server}, err
}

func (s *suite) binary(ctx context.Context) (any, error) {
	rows, err := s.first.Query(ctx,
		"SELECT int8 '-9223372036854775808', float8 '0.1', true, text 'naïve ☃', bytea '\\x00ff10',"+
			" timestamptz '2024-01-02 03:04:05.678Z', '{1,NULL,3}'::int4[]",
		// text has one form for both.
		pgx.QueryResultFormats{pgx.BinaryFormatCode})
	if err != nil {
		return nil, err
	}
	var int8 int64
	var float8 float64
	var boolean bool
	var text string
	var bytea []byte
	var timestamptz time.Time
	var int4s []*int32
	_, err = pgx.ForEachRow(rows, []any{&int8, &float8, &boolean, &text, &bytea, &timestamptz, &int4s},
		func() error {
			for _, field := range rows.FieldDescriptions() {
				if field.Format != pgx.BinaryFormatCode {
					return fmt.Errorf("%s is not binary", field.Name)
				}
			}
			return nil
		})
	return object{
		"int8": fmt.Sprint(int8), "float8": float8, "bool": boolean, "text": text,
		"bytea": hex.EncodeToString(bytea), "timestamptz": timestamptz.UnixMilli(), "int4[]": int4s,
	}, err
}

func (s *suite) copy(ctx context.Context) (any, error) {
	data, low := copyText(), s.first.PgConn()
	if _, err := s.first.Exec(ctx, "CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)"); err != nil {
		return nil, err
	}
	tag, err := low.CopyFrom(ctx, bytes.NewReader(data), "COPY copied FROM STDIN")
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if _, err := low.CopyTo(ctx, &out, "COPY (SELECT * FROM copied ORDER BY id) TO STDOUT"); err != nil {
		return nil, err
	}
	_, err = low.CopyFrom(ctx, strings.NewReader("word\tvalue\n"), "COPY copied FROM STDIN")
	badRow, err := code(err)
	return object{
		"rows_in": tag.RowsAffected(), "out": digest(out.Bytes()),
		"same": bytes.Equal(out.Bytes(), data), "bad_row": badRow,
	}, err
}

func (s *suite) notify(ctx context.Context) (any, error) {
	if _, err := s.first.Exec(ctx, "LISTEN events"); err != nil {
		return nil, err
	}
	err := s.with(ctx, nil, func(other *pgx.Conn) error {
		_, err := other.Exec(ctx, "SELECT pg_notify('events', 'naïve ☃')")
		return err
	})
	if err != nil {
		return nil, err
	}
	notification, err := s.first.WaitForNotification(ctx)
	if err != nil {
		return nil, err
	}
	return object{"channel": notification.Channel, "payload": notification.Payload}, nil
}

func (s *suite) cancel(ctx context.Context) (any, error) {
	failed := make(chan error, 1)
	go func() {
		_, err := s.first.Exec(ctx, endless)
		failed <- err
	}()
	<-s.notices
	if err := s.first.PgConn().CancelRequest(ctx); err != nil {
		return nil, err
	}
	state, err := code(<-failed)
	if err != nil {
		return nil, err
	}
	then, err := one[int](ctx, s.first, "SELECT 1")
	return object{"cancelled": state == "57014", "then": then}, err
}

func (s *suite) largeObject(ctx context.Context) (any, error) {
	var oid uint32
	var written int
	var middle [31]byte
	var content []byte
	err := pgx.BeginFunc(ctx, s.first, func(tx pgx.Tx) error {
		objects := tx.LargeObjects()
		var err error
		if oid, err = objects.Create(ctx, 0); err != nil {
			return err
		}
		object, err := objects.Open(ctx, oid, pgx.LargeObjectModeRead|pgx.LargeObjectModeWrite)
		if err != nil {
			return err
		}
		if written, err = object.Write([]byte(repeated(largeObject))); err != nil {
			return err
		}
		if _, err := object.Seek(500000, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.ReadFull(object, middle[:]); err != nil {
			return err
		}
		if _, err := object.Seek(0, io.SeekStart); err != nil {
			return err
		}
		content, err = io.ReadAll(object)
		return err
	})
	if err != nil {
		return nil, err
	}
	err = pgx.BeginFunc(ctx, s.first, func(tx pgx.Tx) error {
		objects := tx.LargeObjects()
		if err := objects.Unlink(ctx, oid); err != nil {
			return err
		}
		_, err := objects.Open(ctx, oid, pgx.LargeObjectModeRead)
		return err
	})
	// The failure has undone the removal as well.
	gone, err := code(err)
	if err != nil {
		return nil, err
	}
	_, err = s.first.Exec(ctx, "SELECT lo_unlink($1)", oid)
	return object{"written": written, "digest": digest(content), "middle": string(middle[:]), "gone": gone}, err
}

func (s *suite) largeRow(ctx context.Context) (any, error) {
	text := repeated(largeRow)
	out, err := one[string](ctx, s.first, "SELECT "+repeatedSQL(largeRow))
	if err != nil {
		return nil, err
	}
	var length int
	var sum string
	err = s.first.QueryRow(ctx, "SELECT length($1), md5($1)", text).Scan(&length, &sum)
	return object{"out": out == text, "in": []any{length, sum}}, err
}

func (s *suite) transaction(ctx context.Context) (any, error) {
	if _, err := s.first.Exec(ctx, "CREATE TEMP TABLE numbers (n int PRIMARY KEY)"); err != nil {
		return nil, err
	}
	var failed string
	var aborted string
	err := pgx.BeginFunc(ctx, s.first, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO numbers VALUES (1)"); err != nil {
			return err
		}
		// Within a transaction this is a savepoint.
		err := pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) error {
			if _, err := inner.Exec(ctx, "INSERT INTO numbers VALUES (2)"); err != nil {
				return err
			}
			var err error
			_, err = inner.Exec(ctx, "SELECT 1 / 0")
			if failed, err = code(err); err != nil {
				return err
			}
			_, err = inner.Exec(ctx, "SELECT 1")
			return err
		})
		if aborted, err = code(err); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO numbers VALUES (3)")
		return err
	})
	if err != nil {
		return nil, err
	}
	rows, _ := s.first.Query(ctx, "SELECT n FROM numbers ORDER BY n")
	numbers, err := pgx.CollectRows(rows, pgx.RowTo[int])
	return object{"error": failed, "aborted": aborted, "rows": numbers}, err
}
