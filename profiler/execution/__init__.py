"""How rows are skipped: the mechanics under the methods. What is decided, and why, belongs to the methods."""
