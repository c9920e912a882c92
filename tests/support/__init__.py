"""What several tests share: a state machine on a store, driven by hand."""
