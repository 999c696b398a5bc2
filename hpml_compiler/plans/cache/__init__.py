"""SQLite files of earlier launches: plans as text, compiled graphs as bytes."""
