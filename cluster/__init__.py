"""Many groups as one service: placement, requests, ingress."""
