"""Environments in text, each registered by its name when its module is imported: `frozen_lake`, `sudoku`, `textarena`, `xland`."""
