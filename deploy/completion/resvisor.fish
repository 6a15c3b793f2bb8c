# fish completion for resvisor. The program itself knows its commands and options: `resvisor _complete`.
function __resvisor_command
    for word in (commandline -opc)[2..-1]
        if not string match -q -- '-*' $word
            echo $word
            return 0
        end
    end
    return 1
end

function __resvisor_options
    set -l command (__resvisor_command); or return
    resvisor _complete options $command 2>/dev/null
end

function __resvisor_arguments
    switch (__resvisor_command)
        case load unload pin unpin
            resvisor _complete models 2>/dev/null
        case submit restart restore-config
            resvisor _complete types 2>/dev/null
        case logs
            resvisor _complete types 2>/dev/null
            printf '%s\n' router resvisor
        case job fetch cancel
            resvisor _complete jobs 2>/dev/null
        case init
            echo comfyui
            __fish_complete_directories (commandline -ct)
        case help
            resvisor _complete commands 2>/dev/null
    end
end

complete -c resvisor -n 'not __resvisor_command' -f -a '(resvisor _complete commands 2>/dev/null)'
complete -c resvisor -n '__resvisor_command' -f -a '(__resvisor_arguments)'
complete -c resvisor -n '__resvisor_command | string match -qr "^(route|verify)$"' -F
complete -c resvisor -n '__resvisor_command; and string match -q -- "-*" (commandline -ct)' -a '(__resvisor_options)'
for option in config payload out runtime-dir
    complete -c resvisor -n '__resvisor_command' -l $option -rF
end
complete -c resvisor -n '__resvisor_command' -l model -x -a '(resvisor _complete models 2>/dev/null)'
complete -c resvisor -n '__resvisor_command' -l type -x -a '(resvisor _complete types 2>/dev/null)'
complete -c resvisor -n '__resvisor_command' -l set -x -a '(resvisor _complete keys 2>/dev/null)'
