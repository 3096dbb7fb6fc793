"""Other people's interfaces: `gymnasium`, `envpool` (its idiom), `dm_env`, `torch`, `upstream` (xminigrid 0.9.3), and for the pool `openenv`, `trl`, `swift`, `pool_vector`; each imported by name."""
