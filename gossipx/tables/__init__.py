"""The parameter server's tensors: tables on the worker, their partitions on servers, and both on their way between
hosts.
"""
