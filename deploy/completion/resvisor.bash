# bash completion for resvisor. The program itself knows its commands and options: `resvisor _complete`.
_resvisor() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command="" i
    COMPREPLY=()
    # bash splits at "=": "--config=FILE" arrives as three words
    if [[ $word == "=" ]]; then
        word=""
    elif [[ $previous == "=" && COMP_CWORD -gt 1 ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} != -* ]]; then
            command=${COMP_WORDS[i]}
            break
        fi
    done
    local words=""
    case $previous in
    -c | --config | -f | --payload | -o | --out)
        [[ $command == logs && $previous == -f ]] || { compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$word")); return; }
        ;;
    --runtime-dir) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$word")); return ;;
    --log-level) COMPREPLY=($(compgen -W "error warning info debug" -- "$word")); return ;;
    --set) compopt -o nospace 2>/dev/null; COMPREPLY=($(compgen -W "$(resvisor _complete keys 2>/dev/null)" -- "$word")); return ;;
    -m | --model) COMPREPLY=($(compgen -W "$(resvisor _complete models 2>/dev/null)" -- "$word")); return ;;
    -t | --type) COMPREPLY=($(compgen -W "$(resvisor _complete types 2>/dev/null)" -- "$word")); return ;;
    esac
    if [[ -z $command || $command == help ]]; then
        words=$(resvisor _complete commands 2>/dev/null | cut -f 1)
    elif [[ $word == -* ]]; then
        words=$(resvisor _complete options "$command" 2>/dev/null | cut -f 1)
    else
        case $command in
        load | unload | pin | unpin) words=$(resvisor _complete models 2>/dev/null) ;;
        submit | restart | restore-config) words=$(resvisor _complete types 2>/dev/null) ;;
        logs) words="$(resvisor _complete types 2>/dev/null) router resvisor" ;;
        init) COMPREPLY=($(compgen -W comfyui -- "$word") $(compgen -d -- "$word")); return ;;
        route | verify) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$word")); return ;;
        job | fetch | cancel) words=$(resvisor _complete jobs 2>/dev/null) ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _resvisor resvisor
