"""Other interfaces, each imported by name: `gymnasium`, `dm_env`, `torch`, `upstream` (xminigrid 0.9.3); for the pool
`openenv`, `trl`, `swift`, `pool_vector`."""
