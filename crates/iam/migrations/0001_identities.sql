-- One row: the number of the last change. Who changes anything raises it first, and so waits for whoever is at it.
CREATE TABLE meta (
    id BIGINT PRIMARY KEY,
    version BIGINT NOT NULL
);
INSERT INTO meta (id, version) VALUES (1, 0);

-- Rows of these four are never deleted: `removed` is 1 of those that are gone, so that every replica hears of it.
-- `version` is the change that a row was last written by.
CREATE TABLE projects (
    path TEXT PRIMARY KEY,
    ceiling TEXT,
    quota TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    created_by BIGINT NOT NULL,
    removed BIGINT NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX projects_version ON projects (version);

CREATE TABLE identities (
    id BIGINT PRIMARY KEY,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    created_by BIGINT NOT NULL,
    removed BIGINT NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX identities_version ON identities (version);

CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    identity BIGINT NOT NULL,
    sha256 TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    project TEXT,
    permissions TEXT,
    created_ms BIGINT NOT NULL,
    created_by BIGINT NOT NULL,
    expires_ms BIGINT,
    removed BIGINT NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX api_keys_version ON api_keys (version);

CREATE TABLE grants (
    id BIGINT PRIMARY KEY,
    identity BIGINT NOT NULL,
    project TEXT NOT NULL,
    permissions TEXT NOT NULL,
    given_by BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    removed BIGINT NOT NULL,
    version BIGINT NOT NULL
);
CREATE INDEX grants_version ON grants (version);

-- The servers. `beat` is raised once a second by one that lives; `seen` is the change it knows of; `heir` answers for what is
-- charged to one that is no more.
CREATE TABLE replicas (
    id TEXT PRIMARY KEY,
    beat BIGINT NOT NULL,
    seen BIGINT NOT NULL,
    ended BIGINT NOT NULL,
    heir TEXT
);

-- What each server may let in of a quota. `scarce` is raised by one that could not get what it needs. `since`: the change up to which the
-- server knew everything when it wrote the row, so whether it knows of the quota.
CREATE TABLE quota_turns (
    project TEXT NOT NULL,
    counted TEXT NOT NULL,
    turns BIGINT NOT NULL,
    scarce BIGINT NOT NULL,
    PRIMARY KEY (project, counted)
);
CREATE TABLE quota_leases (
    project TEXT NOT NULL,
    counted TEXT NOT NULL,
    replica TEXT NOT NULL,
    amount BIGINT NOT NULL,
    since BIGINT NOT NULL,
    PRIMARY KEY (project, counted, replica)
);

CREATE TABLE audit (
    id TEXT PRIMARY KEY,
    at_ms BIGINT NOT NULL,
    identity BIGINT NOT NULL,
    who TEXT NOT NULL,
    key_id TEXT NOT NULL,
    project TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    denied BIGINT NOT NULL,
    count BIGINT NOT NULL,
    detail TEXT NOT NULL,
    request_id TEXT NOT NULL
);
CREATE INDEX audit_at ON audit (at_ms);
