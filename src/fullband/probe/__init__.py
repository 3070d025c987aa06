"""What each depth of a model knows: linear probes on the residual stream of App. F's inputs (section 4.4, Fig. 7)."""
