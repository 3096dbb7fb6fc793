"""Other people's interfaces: `gymnasium`, `envpool` (its idiom), `dm_env`, `torch` and `upstream` (xminigrid 0.9.3), each imported by name."""
