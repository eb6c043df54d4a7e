"""The database of a shop, made anew by a script and always the same, and questions about it with their right answers.

    python shop.py shop.db

Three things about it cannot be seen in its tables: prices are in cents, cancelled orders do not count, and lists are
wanted in alphabetical order.
"""

import random
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, title TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product_id INTEGER, quantity INTEGER, status TEXT);"""
CITIES = ("Bergen", "Lisbon", "Oslo", "Porto", "Turin")
NAMES = (
    *("Ada", "Alan", "Barbara", "Claude", "Dennis", "Donald", "Edsger", "Frances", "Grace", "Hedy", "Ivan", "Jean"),
    *("John", "Katherine", "Ken", "Leslie", "Linus", "Margaret", "Niklaus", "Radia", "Robin", "Shafi", "Tim", "Tony"),
)
PRICES = {
    "lamp": 3990,
    "chair": 8450,
    "desk": 19900,
    "shelf": 6425,
    "mirror": 4575,
    "vase": 1280,
    "clock": 2999,
    "rug": 12050,
    "stool": 3520,
    "basket": 895,
    "candle": 450,
    "frame": 1675,
}
"""Of the products, in cents."""
ORDERS = 160
ORDERS_OF = "FROM orders JOIN customers ON customers.id = customer_id JOIN products ON products.id = product_id"
QUERIES = {
    "How many customers live in {city}?": "SELECT count(*) FROM customers WHERE city = '{city}'",
    "In which city does {name} live?": "SELECT city FROM customers WHERE name = '{name}'",
    "Which customers live in {city}?": "SELECT name FROM customers WHERE city = '{city}' ORDER BY name",
    "What does the {title} cost, in euros?": "SELECT price / 100.0 FROM products WHERE title = '{title}'",
    "Which products cost less than {euros} euros?": (
        "SELECT title FROM products WHERE price < 100 * {euros} ORDER BY title"
    ),
    "How many orders did {name} place?": (
        f"SELECT count(*) {ORDERS_OF} WHERE name = '{{name}}' AND status <> 'cancelled'"
    ),
    "How much did {name} spend, in euros?": (
        f"SELECT sum(price * quantity) / 100.0 {ORDERS_OF} WHERE name = '{{name}}' AND status <> 'cancelled'"
    ),
    "What did {name} buy?": (
        f"SELECT DISTINCT title {ORDERS_OF} WHERE name = '{{name}}' AND status <> 'cancelled' ORDER BY title"
    ),
}
"""The right query for each kind of question."""

Rows = list[tuple[Any, ...]]


class Question(TypedDict):
    """A task for the agent."""

    question: str
    answer: list[list[Any]]
    """The rows that a right query gives."""


def make_database(path: Path) -> None:
    """Write the database into a new file."""
    chance = random.Random(0)
    people = [(number, name, chance.choice(CITIES)) for number, name in enumerate(NAMES, 1)]
    products = [(number, title, price) for number, (title, price) in enumerate(PRICES.items(), 1)]
    states = ("delivered", "delivered", "sent", "cancelled")
    orders = [
        (number, chance.randint(1, len(people)), chance.randint(1, len(products)), chance.randint(1, 3), state)
        for number, state in enumerate((chance.choice(states) for _ in range(ORDERS)), 1)
    ]
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO customers VALUES (?, ?, ?)", people)
        database.executemany("INSERT INTO products VALUES (?, ?, ?)", products)
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", orders)


def rows_of(path: Path, query: str) -> Rows:
    """What a query gives; it cannot change the database. sqlite3.Error if it is wrong."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return [tuple(row) for row in database.execute(query)]


def make_questions(path: Path) -> list[Question]:
    """All questions, in an order of chance that is always the same."""
    asked = [
        Question(question=kind.format(**values), answer=rounded(rows_of(path, query.format(**values))))
        for kind, query in QUERIES.items()
        for values in _values_for(kind)
    ]
    random.Random(0).shuffle(asked)
    return asked


def rounded(rows: Rows) -> list[list[Any]]:
    """Rows that can be compared: amounts of money have two decimals."""
    return [[round(value, 2) if isinstance(value, float) else value for value in row] for row in rows]


def _values_for(kind: str) -> Iterator[dict[str, Any]]:
    values = {"city": CITIES, "name": NAMES, "title": tuple(PRICES), "euros": tuple(range(10, 130, 10))}
    (placeholder,) = (name for name in values if f"{{{name}}}" in kind)
    for value in values[placeholder]:
        yield {placeholder: value}


if __name__ == "__main__":
    made = Path(sys.argv[1])
    make_database(made)
    counts = f"{len(NAMES)} customers, {len(PRICES)} products, {ORDERS} orders"
    print(f"{made}: {counts}; {len(make_questions(made))} questions")
