-- What was given out under an id of the caller's: work and sequence ids, for ten minutes. Everything else that a repeated
-- call must find bears the caller's id itself, so that answers need not be kept.
DROP TABLE answers;
CREATE TABLE grants (
    grant_id  TEXT PRIMARY KEY,
    kind      TEXT NOT NULL,
    worker_id TEXT,
    time      REAL NOT NULL,
    given     BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX grants_by_time ON grants (time);
