-- Texts that servers share: what a cluster knows of its nodes. `version` counts the changes; an empty body was never written.
CREATE TABLE documents (
    name TEXT PRIMARY KEY,
    version BIGINT NOT NULL,
    body TEXT NOT NULL
);
