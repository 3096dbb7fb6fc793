"""Environments in text, each registered when its module is imported: `frozen_lake`, `sudoku`, `textarena`, `xland`."""
