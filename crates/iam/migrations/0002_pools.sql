-- What creates asked for, by day (days since 1970): `layers` are the names of all that one sandbox is made of, so that it is known
-- what has to be in a place together.
CREATE TABLE pool_accesses (
    day BIGINT NOT NULL,
    layers TEXT NOT NULL,
    count BIGINT NOT NULL,
    last_ms BIGINT NOT NULL,
    PRIMARY KEY (day, layers)
);

-- What was brought to pools of nodes ahead of time. `turn` is raised by each sync that begins, and only the last one may change
-- anything; `version` is raised by each change, so that servers see that there was one.
CREATE TABLE pools (
    name TEXT PRIMARY KEY,
    turn BIGINT NOT NULL,
    version BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    budget BIGINT NOT NULL,
    synced_ms BIGINT NOT NULL
);
CREATE TABLE pool_layers (
    pool TEXT NOT NULL,
    layer TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (pool, layer)
);
