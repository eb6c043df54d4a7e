-- When an attempt is lost unless its worker has named it in a heartbeat.
ALTER TABLE attempts ADD COLUMN lease_until REAL;
