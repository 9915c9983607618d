"""The shared tier: KV in a store that several machines reach, sealed with a key of the team."""
