"""Which block holds what: the paged KV store's bookkeeping. Knows neither torch, nor Ray, nor the clock."""
