-- What is known of the spans of a rollout that have begun and not ended, as one JSON array; pruned by the writer.
CREATE TABLE open_spans (
    rollout INTEGER PRIMARY KEY,
    body    BLOB NOT NULL
);
