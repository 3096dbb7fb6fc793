"""Measurements that users make, too: `xland-minigrid throughput`, `statistics`, `compiled`, and others.

In the package, only the command line imports this subpackage.
"""
