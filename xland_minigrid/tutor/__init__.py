"""Checkers for the exercises of the tutorials, one module for each tutorial, and what grades a notebook."""
from .exercise import EXERCISES, Exercise, Verdict, WrongAnswer, all_exercises, exercise, rejects
