package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
)

func main() {
	ctx := context.Background()
	connection, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close(ctx)
	var name string
	if err := connection.QueryRow(ctx, "SELECT current_database()").Scan(&name); err != nil {
		log.Fatal(err)
	}
	fmt.Println(name)
}
