import os

import psycopg

with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    (name,) = connection.execute("SELECT current_database()").fetchone()
    print(name)
