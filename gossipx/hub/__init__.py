"""Hub mode: elastic averaging with a central model, the centre, that one peer holds."""

from gossipx.hub.centre import Centre
from gossipx.hub.elastic import ElasticExchange, rank_of_hub

__all__ = ["Centre", "ElasticExchange", "rank_of_hub"]
