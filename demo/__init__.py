"""The main job on real text, `python -m demo`: reads Python's own help topics and trains a small model on them.

The topics lie one after another in a single long sequence, and no topic may look into another. Saying so takes one
line of Python (demo/attention.py); everything else here is what a user would write around it.
"""
