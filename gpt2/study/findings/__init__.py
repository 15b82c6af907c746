"""What each notebook finds: the tables it shows, made from traces and recordings."""
