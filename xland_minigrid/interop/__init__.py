"""Other people's interfaces: `gymnasium`, `dm_env`, `torch`, `upstream` (xminigrid 0.9.3), and for the pool `openenv`, `trl`, `swift`, `pool_vector`; each imported by name."""
