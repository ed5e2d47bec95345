# round_robin.py
"""Code 4.1: a placement that assigns tables to servers in turn."""

from gossipx.parts import Partition, Placement


class RoundRobinPlacement(Placement):
    def decide(self, tables, servers):
        placed = [[] for _ in range(servers)]
        for number, table in enumerate(tables):
            placed[number % servers].append(Partition(number, 0, table.size))
        return placed
