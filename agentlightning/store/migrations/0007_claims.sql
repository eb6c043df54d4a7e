-- The last claim of each slot of a worker, under which a repeated claim is known: its counter, and what it gave.
ALTER TABLE workers ADD COLUMN claims BLOB NOT NULL DEFAULT '{}';
DROP TABLE grants;
-- postgres: DROP SEQUENCE queue_head;
