"""The record of a decision: layouts and indices become names, strings and bytes."""
