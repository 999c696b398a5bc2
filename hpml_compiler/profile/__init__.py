"""`hpml profile`: times what runs on the present devices and keeps it for the prices of plans."""
