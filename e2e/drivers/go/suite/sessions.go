package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
)

func (s *suite) encoding(ctx context.Context) (any, error) {
	var client, text string
	var octets int
	err := s.first.QueryRow(ctx,
		"SELECT current_setting('client_encoding'), $1::text, octet_length($1)", "naïve ☃ 𝄞").
		Scan(&client, &text, &octets)
	return object{"client": client, "text": text, "octets": octets}, err
}

func (s *suite) resetAll(ctx context.Context) (any, error) {
	before, err := pairs(ctx, s.first, settingsRows)
	if err != nil {
		return nil, err
	}
	after := func(statements string) ([]string, error) {
		if _, err := s.first.Exec(ctx, statements); err != nil {
			return nil, err
		}
		now, err := pairs(ctx, s.first, settingsRows)
		return changed(before, now), err
	}
	set, err := after("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'")
	if err != nil {
		return nil, err
	}
	left, err := after("RESET ALL")
	return object{"set": set, "left": left}, err
}

func (s *suite) discardAll(ctx context.Context) (any, error) {
	const kept = "SELECT 'kept until now'"
	if _, err := s.first.Exec(ctx, "CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off"); err != nil {
		return nil, err
	}
	if _, err := s.first.Prepare(ctx, "kept", kept); err != nil {
		return nil, err
	}
	if _, err := s.first.Exec(ctx, "DISCARD ALL"); err != nil {
		return nil, err
	}
	// pgx has to be told that its prepared statements are discarded as well.
	if err := s.first.DeallocateAll(ctx); err != nil {
		return nil, err
	}
	left, err := one[int](ctx, s.first,
		"SELECT (SELECT count(*) FROM pg_prepared_statements WHERE name = 'kept')"+
			" + (SELECT count(*) FROM pg_listening_channels())"+
			" + (to_regclass('pg_temp.discarded') IS NOT NULL)::int")
	if err != nil {
		return nil, err
	}
	if _, err := s.first.Prepare(ctx, "kept", kept); err != nil {
		return nil, err
	}
	again, err := one[string](ctx, s.first, "kept")
	return object{"left": left, "prepared_again": again}, err
}

// newPool discards what a user has left, as pgxpool does not by itself.
func (s *suite) newPool(ctx context.Context, size int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(s.connString())
	if err != nil {
		return nil, err
	}
	config.MaxConns = size
	config.AfterRelease = func(connection *pgx.Conn) bool {
		if _, err := connection.Exec(ctx, "DISCARD ALL"); err != nil {
			return false
		}
		return connection.DeallocateAll(ctx) == nil
	}
	return pgxpool.NewWithConfig(ctx, config)
}

func (s *suite) pool(ctx context.Context) (any, error) {
	result := object{}
	if err := s.poolOfOne(ctx, result); err != nil {
		return nil, err
	}
	pool, err := s.newPool(ctx, 4)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	var squares [40]int
	var group errgroup.Group
	for i := range squares {
		group.Go(func() (err error) {
			squares[i], err = one[int](ctx, pool, "SELECT $1::int * $1::int", i)
			return err
		})
	}
	err = group.Wait()
	sum := 0
	for _, square := range squares {
		sum += square
	}
	result["sum"] = sum
	return result, err
}

func (s *suite) poolOfOne(ctx context.Context, result object) error {
	pool, err := s.newPool(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	var first int
	err = pool.AcquireFunc(ctx, func(connection *pgxpool.Conn) error {
		if first, err = one[int](ctx, connection, "SELECT pg_backend_pid()"); err != nil {
			return err
		}
		_, err := connection.Exec(ctx, "SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()")
		return err
	})
	if err != nil {
		return err
	}
	return pool.AcquireFunc(ctx, func(connection *pgxpool.Conn) error {
		pid, err := one[int](ctx, connection, "SELECT pg_backend_pid()")
		if err != nil {
			return err
		}
		result["reused"] = pid == first
		if result["statement_timeout"], err = one[string](ctx, connection, "SHOW statement_timeout"); err != nil {
			return err
		}
		result["temp_table"], err = one[*string](ctx, connection, "SELECT to_regclass('pg_temp.left_over')::text")
		return err
	})
}

func (s *suite) timezone(ctx context.Context) (any, error) {
	result := object{}
	err := s.with(ctx, map[string]string{"TimeZone": "Asia/Kolkata"}, func(connection *pgx.Conn) error {
		var err error
		result["status"] = connection.PgConn().ParameterStatus("TimeZone")
		result["text"], err = one[string](ctx, connection, "SELECT '2024-01-02 03:04:05Z'::timestamptz::text")
		return err
	})
	return result, err
}

func (s *suite) latin1(context.Context) (any, error) {
	return nil, unsupported("pgx reads and writes UTF-8 only, whatever client_encoding is")
}

func (s *suite) applicationName(ctx context.Context) (any, error) {
	result := object{}
	parameters := map[string]string{"application_name": "branchpool drivers"}
	err := s.with(ctx, parameters, func(connection *pgx.Conn) error {
		var err error
		if result["show"], err = one[string](ctx, connection, "SHOW application_name"); err != nil {
			return err
		}
		result["activity"], err = one[string](ctx, connection,
			"SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()")
		return err
	})
	return result, err
}

func (s *suite) options(ctx context.Context) (any, error) {
	names := []string{"geqo", "statement_timeout", "search_path"}
	result := object{}
	parameters := map[string]string{
		"options": `-c geqo=off -c statement_timeout=54321 -c search_path=one,"two\ three"`,
	}
	err := s.with(ctx, parameters, func(connection *pgx.Conn) error {
		var err error
		if result["at_start"], err = shown(ctx, connection, names...); err != nil {
			return err
		}
		_, err = connection.Exec(ctx, "SET geqo = on; SET statement_timeout = 0; SET search_path = public")
		if err != nil {
			return err
		}
		if _, err := connection.Exec(ctx, "RESET ALL"); err != nil {
			return err
		}
		result["after_reset"], err = shown(ctx, connection, names...)
		return err
	})
	return result, err
}

func (s *suite) connects(ctx context.Context) (any, error) {
	sum := 0
	for i := range 1000 {
		err := s.with(ctx, nil, func(connection *pgx.Conn) error {
			number, err := one[int](ctx, connection, "SELECT $1::int", i)
			sum += number
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("connect %d: %w", i, err)
		}
	}
	return object{"sum": sum}, nil
}
