-- What rollouts are filtered and sorted by besides their own columns. A table of its own: a scan of it is short, and what
-- an agent returned stays the last column of its table.
CREATE TABLE rollout_index (
    rollout  INTEGER PRIMARY KEY,
    reward   REAL,
    run_id   TEXT,
    step     INTEGER,
    group_id TEXT,
    agent    TEXT,
    error    TEXT
);
CREATE INDEX rollout_index_by_run ON rollout_index (run_id, step);

-- What is known of the rollouts that are there already.
INSERT INTO rollout_index (rollout, run_id, step, group_id, agent, reward, error)  -- sqlite
SELECT r.number,  -- sqlite
       iif(json_type(r.metadata_text, '$.run_id') = 'text', r.metadata_text ->> '$.run_id', NULL),  -- sqlite
       iif(json_type(r.metadata_text, '$.step') = 'integer', r.metadata_text ->> '$.step', NULL),  -- sqlite
       iif(json_type(r.metadata_text, '$.group') = 'text', r.metadata_text ->> '$.group', NULL),  -- sqlite
       (SELECT iif(json_type(CAST(body AS TEXT), '$.agent') = 'text', CAST(body AS TEXT) ->> '$.agent', NULL)  -- sqlite
        FROM inputs WHERE rollout = r.number),  -- sqlite
       (SELECT CAST(CAST(body AS TEXT) ->> '$.attributes."agentlightning.reward.0.value"' AS REAL) FROM spans  -- sqlite
        WHERE rollout = r.number AND attempt = r.latest AND instr(body, CAST('agentlightning.reward.0.value' AS BLOB))  -- sqlite
        ORDER BY number DESC LIMIT 1),  -- sqlite
       (SELECT (CAST(metadata AS TEXT) ->> '$.error.type') || ': ' || (CAST(metadata AS TEXT) ->> '$.error.message')  -- sqlite
        FROM attempts WHERE rollout = r.number AND sequence_id = r.latest)  -- sqlite
FROM (SELECT number, CAST(metadata AS TEXT) AS metadata_text,  -- sqlite
             (SELECT max(sequence_id) FROM attempts WHERE rollout = number) AS latest FROM rollouts) AS r;  -- sqlite
-- PostgreSQL reads no JSON in which a NUL is written.
-- postgres: INSERT INTO rollout_index (rollout, run_id, step, group_id, reward)
-- postgres: SELECT r.number, m ->> 'run_id', CASE WHEN m ->> 'step' ~ '^[0-9]{1,18}$' THEN (m ->> 'step')::bigint END, m ->> 'group',
-- postgres:        (SELECT (convert_from(body, 'UTF8')::json #>> '{attributes,agentlightning.reward.0.value}')::float8 FROM spans
-- postgres:         WHERE rollout = r.number AND position('agentlightning.reward.0.value'::bytea IN body) > 0
-- postgres:           AND position('\\u0000'::bytea IN body) = 0
-- postgres:         ORDER BY number DESC LIMIT 1)
-- postgres: FROM (SELECT number, convert_from(metadata, 'UTF8')::json AS m FROM rollouts
-- postgres:       WHERE position('\\u0000'::bytea IN metadata) = 0) AS r;
