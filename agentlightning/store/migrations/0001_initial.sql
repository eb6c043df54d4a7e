-- Rollouts have a number of their own: rows that refer to them then lie together in the order of creation, which keeps
-- the cost of a write the same however much is stored. JSON is kept as text in BLOB columns.
--
-- Both SQLite and PostgreSQL run these files. `store/postgres/database.py` puts PostgreSQL's types in the place of
-- SQLite's, and runs the lines that begin with "-- postgres:", which SQLite takes for comments. Lines that end with
-- "-- sqlite" are SQLite's alone.

CREATE TABLE schema_version (
    version      INTEGER PRIMARY KEY,
    applied_time REAL NOT NULL
);

CREATE TABLE rollouts (
    number       INTEGER PRIMARY KEY,
    rollout_id   TEXT NOT NULL UNIQUE,
    status       TEXT NOT NULL,
    mode         TEXT,
    resources_id TEXT,
    start_time   REAL NOT NULL,
    end_time     REAL,
    config       BLOB NOT NULL,
    metadata     BLOB NOT NULL,
    due          REAL  -- when the watchdog must look
);
CREATE INDEX rollouts_by_status ON rollouts (status);
CREATE INDEX rollouts_by_start ON rollouts (start_time);
CREATE INDEX rollouts_newest_first ON rollouts (start_time DESC, number);
CREATE INDEX rollouts_by_due ON rollouts (due) WHERE due IS NOT NULL;

-- Apart from the rollout, because a task may be large and a status changes often.
CREATE TABLE inputs (
    rollout INTEGER PRIMARY KEY,
    body    BLOB NOT NULL
);

CREATE TABLE attempts (
    rollout             INTEGER NOT NULL,
    sequence_id         INTEGER NOT NULL,
    attempt_id          TEXT NOT NULL,
    status              TEXT NOT NULL,
    start_time          REAL NOT NULL,
    end_time            REAL,
    worker_id           TEXT,
    last_heartbeat_time REAL,
    heartbeat_span      INTEGER NOT NULL,  -- spans behind this number are later signs of life
    metadata            BLOB NOT NULL,
    PRIMARY KEY (rollout, sequence_id)
) WITHOUT ROWID;

CREATE TABLE spans (
    number       INTEGER PRIMARY KEY,
    rollout      INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,  -- the attempt's sequence_id
    span_id      TEXT NOT NULL,
    sequence_id  INTEGER NOT NULL,
    arrival_time REAL NOT NULL,  -- the attempt's heartbeat
    bytes_so_far INTEGER NOT NULL,  -- of all bodies up to this one; spans are never deleted, so the last row counts all
    body         BLOB NOT NULL
);
CREATE INDEX spans_by_attempt ON spans (rollout, attempt);  -- and, within an attempt, by number

-- Sequence ids that were given out; a span may show a higher one.
CREATE TABLE sequences (
    rollout_id TEXT PRIMARY KEY,
    last       INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE queue (
    position INTEGER PRIMARY KEY,
    rollout  INTEGER NOT NULL UNIQUE
);

CREATE TABLE resources (
    number       INTEGER PRIMARY KEY,
    resources_id TEXT NOT NULL UNIQUE,
    create_time  REAL NOT NULL,
    update_time  REAL NOT NULL,
    version      INTEGER NOT NULL,
    resources    BLOB NOT NULL
);

CREATE TABLE workers (
    number              INTEGER PRIMARY KEY,
    worker_id           TEXT NOT NULL UNIQUE,
    status              TEXT NOT NULL,
    last_heartbeat_time REAL,
    last_dequeue_time   REAL,
    last_busy_time      REAL,
    last_idle_time      REAL,
    current_rollout_id  TEXT,
    current_attempt_id  TEXT,
    heartbeat_stats     BLOB NOT NULL
);

CREATE TABLE runs (
    number     INTEGER PRIMARY KEY,
    run_id     TEXT NOT NULL UNIQUE,
    name       TEXT NOT NULL,
    status     TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time   REAL,
    config     BLOB NOT NULL,
    metadata   BLOB NOT NULL,
    summary    BLOB NOT NULL
);

CREATE TABLE metrics (
    number INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    step   INTEGER NOT NULL,
    time   REAL NOT NULL,
    body   BLOB NOT NULL
);
CREATE INDEX metrics_by_run ON metrics (run_id, step);

CREATE TABLE settings (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE answers (
    request_id TEXT PRIMARY KEY,
    operation  TEXT NOT NULL,
    body       BLOB NOT NULL,
    time       REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX answers_by_time ON answers (time);

-- The notices of one commit in one row, under the number of the last of them.
CREATE TABLE notices (
    last_cursor INTEGER PRIMARY KEY,
    body        BLOB NOT NULL
);

-- postgres: ALTER TABLE spans RENAME bytes_so_far TO bytes;  -- several writers cannot share a running sum
-- postgres: ALTER TABLE spans ALTER body SET COMPRESSION lz4;
-- postgres: ALTER TABLE inputs ALTER body SET COMPRESSION lz4;
-- postgres: DROP INDEX spans_by_attempt;
-- postgres: CREATE INDEX spans_by_attempt ON spans (rollout, attempt, number);
-- postgres: CREATE SEQUENCE queue_tail;
-- postgres: CREATE SEQUENCE queue_head INCREMENT -1 MAXVALUE -1 START -1;

-- Notices of committed transactions that have no cursor yet. Not in PostgreSQL's log, to which they would add a tenth;
-- a crash of the database empties the table, and the missing row 0 then tells that notices were lost.
-- postgres: CREATE UNLOGGED TABLE outbox (
-- postgres:     number BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
-- postgres:     body   BYTEA NOT NULL
-- postgres: );
-- postgres: INSERT INTO outbox VALUES (0, '');
