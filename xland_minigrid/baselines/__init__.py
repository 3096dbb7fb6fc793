"""Agents that learn to learn: RL² by recurrent PPO, from the network to the demonstration.

The parts are imported from their modules (`xland_minigrid.baselines.rl2` and so on), so that importing the package stays quick.
"""
