"""What a parameter server's tables lie in: on the worker's side, on the server's, and on the way between them."""
