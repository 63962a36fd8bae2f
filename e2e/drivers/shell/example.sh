psql "$DATABASE_URL" -Atc 'SELECT current_database()'
