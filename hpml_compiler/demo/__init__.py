"""`hpml demo`: an ordinary training script with its text, and the code that runs it and compares losses."""
