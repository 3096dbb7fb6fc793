"""An environment server on every node of a Ray cluster, and the addresses for one pool on all of them.

Install `xland_minigrid[ray]` on every node. Then, in a program that runs in the cluster:

    import ray
    from ray_pool import start_servers
    from xland_minigrid.pool import EnvPool

    ray.init()
    actors, urls, token = start_servers(env="XLand-MiniGrid-R1-9x9", benchmark="trivial-21k", slots=64)
    async with EnvPool.connect(urls, size=64 * len(urls), group_size=8, token=token) as pool:
        ...

Each server listens on the address that Ray knows its node by, and wants a token. It ends with its actor, however that
ends: by `ray.get(actor.stop.remote())`, which lets running episodes end, by `ray.kill`, or with the program.
"""
import secrets

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xland_minigrid.pool import start_server


@ray.remote(num_cpus=1)
class PoolServer:
    def __init__(self, token: str, settings: dict):
        self.process = start_server(host=ray.util.get_node_ip_address(), token=token, **settings)

    def url(self) -> str:
        return self.process.url

    def stop(self) -> int:
        return self.process.stop(timeout=60)


def start_servers(**settings) -> tuple[list, list[str], str]:
    "Start a server with these settings of `start_server` on each node. Returns the actors, the addresses and the token."
    token = secrets.token_urlsafe(24)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes() if node["Alive"]]
    actors = [PoolServer.options(scheduling_strategy=place).remote(token, settings) for place in places]
    return actors, ray.get([actor.url.remote() for actor in actors]), token
