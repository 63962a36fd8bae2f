import os

from sqlalchemy import create_engine, make_url, text

url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
engine = create_engine(url)
with engine.connect() as connection:
    print(connection.scalar(text("SELECT current_database()")))
