"""Model families: how each names and stores what one network computes."""
