// The common checks with pgx and pgxpool.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// Config says where the server is. With a CA the connection is TLS and the server's name is checked.
type Config struct {
	Host     string   `json:"host"`
	Port     uint16   `json:"port"`
	User     string   `json:"user"`
	Password string   `json:"password"`
	Database string   `json:"database"`
	CA       string   `json:"ca"`
	Only     []string `json:"only"`
}

type object map[string]any

// unsupported is what this driver cannot do, and why.
type unsupported string

func (reason unsupported) Error() string { return string(reason) }

type check struct {
	name string
	run  func(context.Context) (any, error)
}

func (config Config) wants(name string) bool {
	for _, wanted := range config.Only {
		if wanted == name {
			return true
		}
	}
	return len(config.Only) == 0
}

func results(ctx context.Context, config Config, checks []check) object {
	results := object{}
	for _, check := range checks {
		if !config.wants(check.name) {
			continue
		}
		result, err := check.run(ctx)
		var reason unsupported
		switch {
		case errors.As(err, &reason):
			results[check.name] = object{"unsupported": string(reason)}
		case err != nil:
			fmt.Fprintln(os.Stderr, check.name, err)
			results[check.name] = object{"failed": err.Error()}
		default:
			results[check.name] = result
		}
	}
	return results
}

func run() error {
	var config Config
	if err := json.NewDecoder(os.Stdin).Decode(&config); err != nil {
		return err
	}
	ctx := context.Background()
	suite, err := newSuite(ctx, config)
	if err != nil {
		return err
	}
	defer suite.first.Close(ctx)
	return json.NewEncoder(os.Stdout).Encode(results(ctx, config, suite.checks()))
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
