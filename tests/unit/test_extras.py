from verl_fuse.extras import install


def test_a_clone_is_installed_from_where_it_is(repo, tmp_path):
    assert install("verl") == f"pip install -e '{repo}[verl]'"
    assert install("plot", root=tmp_path) == "pip install 'verl-fuse[plot]'"
