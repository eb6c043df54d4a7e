-- What an agent returned, as JSON. The last column, so that reading the others never touches the pages of a long one.

ALTER TABLE rollouts ADD COLUMN output BLOB;
