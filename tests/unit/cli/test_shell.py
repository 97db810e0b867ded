"""Shell scripts are read as bash reads them, what they do not tell is marked, and nothing of them is run."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from verl_fuse.cli.shell import TRAINER, find_launch, launch_of, shown, untold
from verl_fuse.errors import FuseError

RUN = f"python3 -m {TRAINER}"
# Read by bash too: what the command gets there is what is read here.
SAME = {
    "lines that go on": f"{RUN} a.x=1 \\\n  a.y=2 \\\n  a.z=3\n",
    "a comment ends them": f"{RUN} a.x=1 \\\n  # a.y=2 \\\n  a.z=3\n",
    "quotes": f"""{RUN} 'a.x=[1, 2]' "a.y=b c" a.z='["u","v"]' a.u=\\"q\\" a.v="it's" a.w=''\n""",
    "variables": f'A=1; B="$A-2"; export C=${{B}}3\n{RUN} a.x=$A a.y=${{B}} a.z="${{C}}" a.u=\'$A\' a.v=$A$B\n',
    "a text without quotes is split": f'MORE="a.x=1   a.y=2"\n{RUN} $MORE "a.z=$MORE"\n',
    "defaults": f"E=''\n{RUN} a.x=${{U:-3}} a.y=${{E:-4}} a.z=${{E-5}} a.u=${{E:+6}} a.v=${{V:=7}} a.w=$V\n",
    "a default within a default": f'{RUN} a.x=${{U:-${{W:-b}}/c}} "a.y=${{U:-d e}}"\n',
    "parts of a value": "P=/a/b.c/d.e\n"
    + f"{RUN} a.x=${{P##*/}} a.y=${{P%/*}} a.z=${{P#*.}} a.u=${{P%%.*}} a.v=${{P//b/X}} a.w=${{P:1:3}} a.l=${{#P}}\n",
    "slashes that are replaced": "M=Qwen/Qwen2.5-7B\n"
    + f"""{RUN} a.x=${{M//\\//--}} a.y=${{M////_}} "a.z=${{M/\\//-}}" a.u=${{M/"/"/x}} a.v=${{M//Q/\\/}}\n""",
    "upper and lower case": f"P=aBc\n{RUN} a.x=${{P^^}} a.y=${{P,,}} a.z=${{P^}}\n",
    "arithmetic": f"N=4\n{RUN} a.x=$((1024 * (N + 2))) a.y=$(($N / 3)) a.z=$(((N+1)*2)) a.u=$((-7 + N % 3))\n",
    "arrays": f'X=(a.x=1 "a.y=2 3" # no\n  a.z=4\n)\nX+=(a.u=5)\n{RUN} "${{X[@]}}" ${{X[0]}} b.n=${{#X[@]}}\n',
    "comments in an array": f'X=(\n  # 1) don\'t\n  a.x=1  # 8 (:\n  # 2) more\n  a.y=2\n)\n{RUN} "${{X[@]}}" a.z=3\n',
    "a command's own variables": f"A=1\nA=5 B=2 true\nA=6 {RUN} a.x=$A\n",
    "a loop that leaves others alone": f"N=3\nfor A in 1 2; do B=$A; done\n{RUN} a.x=$N\n",
    "a loop with a known end": f"N=1\nwhile [ $N -lt 8 ]; do N=$((N * 2)); done\n{RUN} a.x=$N\n",
    "until": f"N=1\nuntil [ $N = 3 ]; do N=$((N + 1)); done\n{RUN} a.x=$N\n",
    "variables of a subshell": f"A=1\n(A=2; cd /tmp)\n{RUN} a.x=$A\n",
    "an array as one word": f'F=(a b)\nIFS=,\n{RUN} "a.x=[${{F[*]}}]" "$*"\n',
    "an array as one word, blanks": f'F=(a.x=1 a.y=2)\nC="{RUN} ${{F[*]}}"\nD="${{F[@]}}"\neval $C a.n=${{#D}}\n',
    "division towards zero": f"{RUN} a.x=$((-7 / 2)) a.y=$((-7 % 3)) a.z=$((7 / -2))\n",
    "signs that begin no comment": f'X=(a.x=b#c "a.y=# )")\n{RUN} "${{X[@]}}" a.n=${{#X[@]}}\n',
    "an empty array": f'X=()\n{RUN} "${{X[@]}}" a.x=1\n',
    "adding to a variable": f"A=1\nA+=2\n{RUN} a.x=$A\n",
    "its arguments": f'N=$1; shift\n{RUN} a.x=$N a.n=$# "$@" a.y=${{3:-none}}\n',
    "the number of arguments": f"{RUN} a.x=${{#@}} a.y=${{#*}}; shift 3; N=${{#@}}\n",
    "some arguments, and elements of an array": "X=(a.x=1 a.y=2 a.z=3)\n"
    + f'{RUN} "${{X[@]:0:2}}" "${{@:2:1}}" "${{X[@]:1:1}}" "a.u=${{X[*]:1:2}}" "${{X[@]:0:0}}"\n',
    "arguments from the second on": f'{RUN} "${{@:2}}"\n',
    "a function": f'go() {{\n  {RUN} a.x=$1 "${{@:2}}"\n}}\ngo 5 a.y=6\n',
    "function go": f"function go {{ {RUN} a.x=$1; }}\ngo 5\n",
    "if": f'A=1\nif [ "$A" -eq 2 ]; then B=x; elif [[ $A == 1 && -n $A ]]; then B=y; else B=z; fi\n{RUN} a.x=$B\n',
    "if not": f"A=\nif [ ! -z $A ]; then B=x; else B=y; fi\n{RUN} a.x=$B\n",
    "a variable that nobody set": f'if [ -z "$U" ]; then U=5; fi\n{RUN} a.x=$U\n',
    "case": f"A=Qwen3\ncase $A in llama*) B=1 ;; Qwen2|Qwen3) B=2 ;; *) B=3 ;; esac\n{RUN} a.x=$B\n",
    "and, or": f'A=1\n[ "$A" = 1 ] && B=x || B=y\n[ "$A" = 2 ] && B=z\n[ "$A" = 2 ] || C=u\n{RUN} a.x=$B a.y=$C\n',
    "a loop over one value": f"for A in 7; do\n  {RUN} a.x=$A\ndone\n",
    "redirections and pipes": f"{RUN} a.x=1 2>&1 | tee log_$$.txt > /dev/null\n",
    "in the background": f"{RUN} a.x=1 > /dev/null 2>&1 &\nwait\n",
    "a here-document is no command": f"cat > /dev/null <<'END'\n{RUN} a.x=1\nEND\n{RUN} a.x=2\n",
    "another shell": f"A=3\nbash -c \"{RUN} a.x=$A a.y='b c'\"\n",
    "eval": f'CMD="{RUN} a.x=1"\nCMD="$CMD a.y=2"\neval "$CMD"\n',
    "a command in a variable": f"CMD='{RUN}'\n$CMD a.x=1\n",
    "variables of the command": f"A=1 env B=2 nohup {RUN} a.x=1\n",
    "a subshell": f"(A=2; {RUN} a.x=$A)\n",
    "a C string": f"{RUN} a.x=$'b\\tc'\n",
    "what looks for it": f"echo {TRAINER} | grep {TRAINER} > /dev/null\n{RUN} a.x=1\n",
}


def arguments(text: str, *given: str, **environment: str) -> list[str]:
    launch, _ = find_launch(text, "run.sh", given, environment)
    return list(launch.arguments)


@pytest.mark.parametrize("name", SAME)
def test_arguments_are_those_that_bash_gives(name: str, tmp_path: Path):
    given = ("9", "a.g=b c", "a.h=1")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word" >> "$SEEN"; done\n')
    python.chmod(0o755)
    seen = tmp_path / "seen"
    script = tmp_path / "run.sh"
    script.write_text(SAME[name])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SEEN": str(seen)}
    subprocess.run([bash, str(script), *given], env=environment, cwd=tmp_path, capture_output=True, timeout=60)
    _, module, *expected = seen.read_text().split("\0")[:-1]
    assert module == TRAINER
    assert arguments(SAME[name], *given) == expected


@pytest.mark.parametrize(
    ("text", "told", "names"),
    [
        (f"{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"{RUN} a.x=${{D}}/train.parquet", "a.x=$D/train.parquet", ["D"]),
        (f"{RUN} a.x=$(nproc --all)", "a.x=$(nproc --all)", ["$(nproc --all)"]),
        (f"{RUN} a.x=`date`", "a.x=`date`", ["`date`"]),
        (f"N=$(nproc)\n{RUN} a.x=$((N * 2))", "a.x=$(nproc)", ["$(nproc)"]),
        (f"{RUN} a.x=$((G * 2))", "a.x=$G", ["G"]),
        (f"if [ -f x ]; then N=1; else N=2; fi\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f'if [ "$H" = a ]; then N=1; fi\n{RUN} a.x=$N', "a.x=$N", ["N"]),
        (f"for N in 1 2; do {RUN} a.x=$N; done", "a.x=$N", ["N"]),
        (f"N=1\nfor A in 1 2; do N=$((N * 2)); done\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=8\n((N *= 2))\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=8\nlet N++\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=8\nread -r N <<< 5\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=8\nprintf -v N %s 5\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=8\nmapfile N < x\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=1\nwhile [ -f x ]; do N=2; done\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=1\nwhile true; do N=$((N + 1)); done\n{RUN} a.x=$N", "a.x=$N", ["N"]),
        (f"N=aab\n{RUN} a.x=${{N/#a/X}}", "a.x=${N/#a/X}", ["${N/#a/X}"]),
        (f"{RUN} a.x=$2", "a.x=$2", ["2"]),
        (f"{RUN} $MORE", "$MORE", ["MORE"]),
        (f"N=8\nread N\nwhile read L; do N=9; done\n{RUN} a.x=$N", "a.x=$N", ["N"]),
    ],
)
def test_what_the_script_does_not_tell_is_marked_and_not_guessed(text: str, told: str, names: list[str]):
    (word,) = arguments(text, "first")
    assert (shown(word), untold(word)) == (told, names)


def test_both_arms_of_an_unknown_condition_that_agree_tell_the_value():
    text = f"if [ -f x ]; then A=1; B=2; else A=1; B=3; fi\n{RUN} a.x=$A a.y=$B"
    assert [shown(word) for word in arguments(text)] == ["a.x=1", "a.y=$B"]


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ('if [ "$H" = a ]; then X+=(a.z=3); fi', ["a.x=1", "a.y=2", "$X", "a.u=5"]),
        ("if [ -f x ]; then X+=(a.z=3); else X+=(a.z=4 a.w=5); fi", ["a.x=1", "a.y=2", "$X", "a.u=5"]),
        ("if [ -f x ]; then X=(a.x=1); fi", ["a.x=1", "$X", "a.u=5"]),
        ("if [ -f x ]; then X[0]=a.x=9; fi", ["$X", "a.u=5"]),
        ("if [ -f x ]; then X=; fi", ["$X", "a.u=5"]),
        ("for N in 1 2; do X+=(a.$N=1); done", ["a.x=1", "a.y=2", "$X", "a.u=5"]),
        ("while [ -f x ]; do X+=(a.z=3); done", ["a.x=1", "a.y=2", "$X", "a.u=5"]),
        ('if [ "$H" = a ]; then Y=1; fi', ["a.x=1", "a.y=2", "a.u=5"]),
    ],
)
def test_of_an_array_that_may_be_longer_the_elements_before_are_known(change: str, read: list[str]):
    text = f'X=(a.x=1 a.y=2)\n{change}\nX+=(a.u=5)\n{RUN} "${{X[@]}}"'
    assert [shown(word) for word in arguments(text)] == read


def test_the_environment_counts_and_the_file_goes_before_it():
    text = f"N=${{N:-2}}\nM=3\n{RUN} a.x=$N a.y=$M a.z=$K"
    assert arguments(text, N="8", M="9", K="10") == ["a.x=8", "a.y=3", "a.z=10"]


def test_an_apostrophe_in_a_default_is_no_quote():
    """As sh reads it; bash refuses it."""
    assert arguments(f"""{RUN} "a.x=${{U:-it's}}" a.y=1""") == ["a.x=it's", "a.y=1"]


@pytest.mark.parametrize("word", ["${A:-${B:-it's}}", "${U:-US$'s}", "$((1", "$(date", "`date", "${A"])
def test_what_has_no_end_ends_no_reader(word: str):
    with suppress(FuseError):
        assert arguments(f'{RUN} "a.x={word}" a.y=1')


def test_nothing_of_a_script_is_run(tmp_path: Path):
    mark = tmp_path / "mark"
    text = f"touch {mark}\nA=$(touch {mark}; echo 1)\nB=`touch {mark}`\neval 'touch {mark}'\n{RUN} a.x=$A\n"
    arguments(text)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo hello\n", f"no command of {TRAINER}"),
        ("", f"no command of {TRAINER}"),
        ("# " + RUN + " a.x=1\n", f"no command of {TRAINER}"),
        (f"{RUN} a.x=1\n\n{RUN} a.x=2\n", "lines 1 and 3 each start"),
        (f"if [ -f x ]; then\n{RUN} a.x=1\nelse\n{RUN} a.x=2\nfi\n", "lines 2 and 4 each start"),
        (f"if true; then\n{RUN} a.x=1\n", "line 1: there is no 'fi'"),
        (f"A=1\n{RUN} 'a.x=1\n", "line 2: the quote ' has no end"),
        (f"{RUN} a.x=${{A\n", "line 1: ${ has no end"),
        ("for A in 1 2; do\n  echo $A\n", "line 1: there is no 'done'"),
    ],
)
def test_a_script_without_one_command_is_refused_by_line(text: str, says: str):
    with pytest.raises(FuseError) as error:
        find_launch(text, "run.sh", (), {})
    assert says in str(error.value)


def test_the_same_command_twice_is_one():
    assert arguments(f"if [ -f x ]; then {RUN} a.x=1; else {RUN} a.x=1; fi\n") == ["a.x=1"]
    assert arguments(f"if false; then {RUN} a.x=1; else {RUN} a.x=2; fi\n") == ["a.x=2"]


def test_another_trainer_with_verl_s_arguments_is_taken_where_verl_s_is_not_started():
    own = "python3 -m recipe.dapo.main_dapo data.train_batch_size=8"
    launch, _ = find_launch(f"python prepare.py --out data\n{own}\n", "run.sh", (), {})
    assert (launch.trainer, launch.is_verl_s, launch.line) == ("recipe.dapo.main_dapo", False, 2)
    launch, _ = find_launch(f"{own}\n{RUN} a.x=1\n", "run.sh", (), {})
    assert (launch.trainer, launch.is_verl_s) == (TRAINER, True)
    assert launch_of(["torchrun", "verl/trainer/main_ppo.py", "a.x=1"]).is_verl_s
    assert launch_of(["python", "prepare.py", "--out", "data"]) is None


def test_arguments_that_bash_takes_for_commands_are_told_by_line():
    launch, _ = find_launch(f"{RUN} a.x=1 \\\n  # off \\\n  data.train_batch_size=8\n", "run.sh", (), {})
    assert (launch.arguments, launch.lost) == (("a.x=1",), 3)
    launch, _ = find_launch(f"{RUN} a.x=1\necho data.train_batch_size=8\n", "run.sh", (), {})
    assert launch.lost is None


def test_a_script_tells_whether_it_passes_its_arguments_on():
    assert find_launch(f'{RUN} "$@"', "run.sh", (), {})[1]
    assert find_launch(f"N=${{1:-2}}\n{RUN} a.x=$N", "run.sh", (), {})[1]
    assert not find_launch(f"{RUN} a.x=1", "run.sh", (), {})[1]
    helper = f'say() {{ echo "$1" "$@"; }}\ngo() {{ {RUN} a.x=1 "$@"; }}\nsay start\n'
    assert not find_launch(f"{helper}go a.y=2", "run.sh", (), {})[1]
    assert find_launch(f'{helper}go "$@"', "run.sh", (), {})[1]


def test_calls_without_end_are_left():
    assert arguments(f"go() {{ go; }}\ngo\n{RUN} a.x=1") == ["a.x=1"]


def test_a_function_that_calls_itself_is_read_once():
    assert arguments(f"go() {{ go; go; go; }}\ngo\n{RUN} a.x=1") == ["a.x=1"]
