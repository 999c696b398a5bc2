"""The description of a plan for people, as data. Tables, pictures, texts and pages show it and compute nothing themselves."""
