import asyncio
import os

import asyncpg


async def main():
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    print(await connection.fetchval("SELECT current_database()"))
    await connection.close()


asyncio.run(main())
