"""The paper's analysis of what eviction loses: its figures and tables, on any model and text."""
