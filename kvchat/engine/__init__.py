"""Floor 3: requests, scheduling, sampling. Joins the cache and the model; works on token ids."""
